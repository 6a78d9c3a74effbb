"""The flags and the help of `hf-paged`, which start without torch: importing hf_paged imports it.

A command runs in the module of its name in `hf_paged.cli`.
"""

__version__ = "0.3.0"
