"""`python -m flexroll`."""

from flexroll.cli import main

main()
