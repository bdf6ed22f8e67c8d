"""``python -m llmaas_eval.knn``."""

import sys

from llmaas_eval.knn.cli import main

sys.exit(main())
