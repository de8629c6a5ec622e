"""Tests of hooks import libraries that import triton; those of kernels, collected later, need it
interpreted.
"""

import tests.support.interpreted  # noqa: F401  # its import is what counts
