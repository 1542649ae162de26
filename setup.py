"""The compiled hot path of the hook; without a compiler the package is built and works without
it. No debug information (-g0): it would hold the path of the build, and no two builds be alike."""

from setuptools import Extension, setup

FOLDER = "miner_guard/flight_recorder"

setup(
    ext_modules=[
        Extension(
            "miner_guard.flight_recorder._hot",
            [f"{FOLDER}/_hot.c", f"{FOLDER}/_hot_loop.c"],
            depends=[f"{FOLDER}/_hot.h"],
            extra_compile_args=["-O2", "-g0", "-std=c11", "-Wall", "-Wextra"],
            optional=True,
        )
    ]
)
