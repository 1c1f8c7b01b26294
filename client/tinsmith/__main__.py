"""`python -m tinsmith`, for programs that must run the installation to which they belong."""

from tinsmith.cli import main

main()
