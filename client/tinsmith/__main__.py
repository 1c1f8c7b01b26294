"""`python -m tinsmith`, which runs the installation of the current Python interpreter."""

from tinsmith.cli import main

main()
