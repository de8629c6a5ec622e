"""Where the package's own files are."""

from pathlib import Path

__all__ = ["DEFAULT_MODEL"]

#: Directory of the small trained model that ships with the package.
DEFAULT_MODEL = Path(__file__).parent / "tiny"
