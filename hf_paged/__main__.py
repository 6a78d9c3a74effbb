"""The command line as a module: python -m hf_paged.

python -m hf_paged transformers serve MODEL --continuous-batching: transformers' own command line, whose
continuous batching the engine computes.
"""

from __future__ import annotations

import sys

from hf_paged_cli.main import main

from .continuous import transformers_main

if __name__ == "__main__":
    if sys.argv[1:2] == ["transformers"]:
        transformers_main()
    else:
        sys.exit(main())
