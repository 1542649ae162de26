"""Builds the compiled search through the miner's output. Without a compiler the package still
builds, and works without it. No debug information (-g0): it would contain the build path, and no
two builds would be identical."""

from setuptools import Extension, setup

FLAGS = ["-O2", "-g0", "-std=c11", "-Wall", "-Wextra"]

setup(
    ext_modules=[
        Extension(
            "miner_guard.eventlog._templates",
            ["miner_guard/eventlog/_templates.c"],
            extra_compile_args=FLAGS,
            optional=True,
        ),
        Extension(
            "miner_guard.incidents._frames",
            ["miner_guard/incidents/_frames.c"],
            extra_compile_args=FLAGS,
            optional=True,
        ),
    ]
)
