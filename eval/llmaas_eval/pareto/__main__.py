"""``python -m llmaas_eval.pareto``."""

import sys

from llmaas_eval.pareto.cli import main

sys.exit(main())
