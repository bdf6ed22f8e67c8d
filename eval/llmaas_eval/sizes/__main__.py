"""Entry point of ``python -m llmaas_eval.sizes``."""

import sys

from llmaas_eval.sizes.cli import main

sys.exit(main())
