"""``python -m llmaas_eval.distillation``."""

import sys

from llmaas_eval.distillation.cli import main

sys.exit(main())
