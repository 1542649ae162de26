"""Runs in every Python process that the miner starts, so it does almost nothing.

It watches for the import of a few modules and then calls `miner_guard.attach`. In child processes
of a rank (upload workers, dataloaders) it does nothing. It also runs the sitecustomize that it
shadows, if there is one.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _say(what):
    """Report on one line that the guard could not be imported. Never raises."""
    try:
        os.write(
            2, f"GUARD DEGRADED: {what}; training continues without it\n".encode("utf-8", "replace")
        )
    except OSError:
        return


class Watch:
    """Import hook that calls `imported(name, module)` after one of `names` has been imported."""

    def __init__(self, names, imported):
        self.names = set(names)
        self.imported = imported

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        self.names.discard(name)
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                self._follow(name, spec)
                return spec
        return None

    def _follow(self, name, spec):
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module):
            loader.__dict__.pop("exec_module", None)
            execute(module)
            self.imported(name, module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            _say(f"the import of {name} can't be watched")


class Home:
    """Import hook that finds the guard's package if the miner's Python lacks it."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if path is not None or name != "miner_guard":
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [self.folder])


def _imported(name, module):
    mode = os.environ.get("_MINER_GUARD_ATTACH")
    try:
        home = os.environ.get("_MINER_GUARD_HOME")
        if home and not any(isinstance(finder, Home) for finder in sys.meta_path):
            # Add it last, so that a miner_guard installed in the miner's Python takes precedence.
            sys.meta_path.append(Home(home))
        import importlib

        # The process may hang before it has a rank: in init_process_group, or while it loads data.
        dumps = importlib.import_module("miner_guard.rank.dumps")
        dumps.begin_early(os.environ.get("_MINER_GUARD_STATE_DIR"))
        importlib.import_module(f"miner_guard.attach.{mode}").imported(name, module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the miner starts without the guard rather than not at all; it is reported
        _say(f"attach {mode} at {name}: {type(error).__name__}: {error}")


def _chain():
    """Run the sitecustomize that this one shadows."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


# A rank that has replaced its program (os.execv) still has the pid that attached: it is a rank.
if os.environ.get("_MINER_GUARD_ATTACH") and os.environ.get("_MINER_GUARD_ATTACHED", "") in (
    "",
    str(os.getpid()),
):
    if sys.version_info >= (3, 10):  # noqa: UP036 - the miner's Python can be a different version
        sys.meta_path.insert(
            0, Watch(os.environ.get("_MINER_GUARD_ATTACH_MODULES", "").split(","), _imported)
        )
    else:
        _say(f"Python {sys.version.split()[0]} is too old to attach to")
_chain()
