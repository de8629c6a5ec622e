"""``python -m disconnect_watch.cli``."""

from disconnect_watch.cli import main

main()
