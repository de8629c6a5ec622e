"""Triton as an interpreter, on tensors of the CPU.

Whether it is one is decided when triton is first imported, by whatever imports it: transformers
and diffusers do so too. So the first test that may lead there imports this before.

Attributes:
    lack: why kernels cannot be interpreted; empty where they can.
"""

import os

__all__ = ["lack"]

os.environ["TRITON_INTERPRET"] = "1"
try:
    from disconnect_watch.kernels import jit
except ImportError:
    lack = "triton is not installed"
else:
    lack = "" if jit.is_interpreted else "triton was imported before, to compile: run apart"
finally:
    del os.environ["TRITON_INTERPRET"]
