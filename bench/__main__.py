"""Everything that can be measured on this machine."""

import sys

from bench import attention, packed, start, statistics

sys.argv = sys.argv[:1]
attention.main()
packed.main()
statistics.main()
start.main()
