"""A program that becomes a Python with other packages before its own: with_packages.py ENVIRONMENT ARGUMENT…."""

from __future__ import annotations

import os
import sys
import sysconfig

if __name__ == "__main__":
    places = {"base": sys.argv[1], "platbase": sys.argv[1]}
    os.environ["PYTHONPATH"] = sysconfig.get_path("purelib", vars=places)
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
