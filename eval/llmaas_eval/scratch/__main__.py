"""Entry point of ``python -m llmaas_eval.scratch``."""

import sys

from llmaas_eval.scratch.cli import main

sys.exit(main())
