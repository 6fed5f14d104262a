"""`python -m loader` where loader is installed; in a checkout that is loader.py itself."""

import sys

from loader.jit.tools.cli import main

sys.exit(main())
