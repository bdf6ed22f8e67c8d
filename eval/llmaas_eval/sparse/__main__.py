"""``python -m llmaas_eval.sparse``."""

import sys

from llmaas_eval.sparse.cli import main

sys.exit(main())
