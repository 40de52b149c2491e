"""Compiles the data path with mypyc, if REWAKE_COMPILE is 1: the same modules, as typed as they are, without the interpreter.

All else about the package stands in pyproject.toml. ``make compiled`` builds and installs it so; `docs/benchmarks.md` says what
it gains. Without it everything works the same, at a higher price per request.
"""

import os

from setuptools import setup

HOT = {
    "gateway": "access affinity answering body claim connection current decisions dialects envelope epilogue eta exchange "
    "fastpath ledger life limits metrics outbox passing permits plain registry relay sampling trail usage waitroom",
    "policies": "balance fair health",
}
"""What a plain request runs through. They call each other without the interpreter only if they are compiled together."""


def extensions() -> list:
    if os.environ.get("REWAKE_COMPILE") != "1":
        return []
    from mypyc.build import mypycify  # noqa: PLC0415 -- only where it is asked for

    modules = [f"{package}/{name}.py" for package, names in HOT.items() for name in names.split()]
    # The tests' build is for what it does, not for how fast it does it.
    return mypycify(modules, opt_level=os.environ.get("REWAKE_COMPILE_OPT", "2"), debug_level="0", target_dir="build/mypyc")


setup(ext_modules=extensions())
