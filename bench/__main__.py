"""Everything that can be measured on this machine."""

import sys

from bench import attention, start, statistics

sys.argv = sys.argv[:1]
attention.main()
statistics.main()
start.main()
