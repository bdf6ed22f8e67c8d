"""``python -m llmaas_eval.elastic``."""

import sys

from llmaas_eval.elastic.cli import main

sys.exit(main())
