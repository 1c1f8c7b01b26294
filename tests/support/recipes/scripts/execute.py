"""A program that becomes a program of another environment, in a folder: execute.py FOLDER PROGRAM ARGUMENT…."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    os.execv(sys.argv[2], sys.argv[2:])
