"""`python -m tinsmith`, for programs that must run the installation they belong to."""

from tinsmith.cli import main

main()
