"""For native code: where the public header is. ``native.pxd`` declares it for Cython.

The header says how C, C++ and Cython code watch connections and read cancel
flags without the GIL, and who keeps what alive. ``tests/native`` has an
extension module in each language.
"""

from pathlib import Path

__all__ = ["get_include"]


def get_include() -> str:
    """The directory of ``disconnect_watch.h``, for a compiler's ``-I``."""
    return str(Path(__file__).parent / "include")
