import sys

from examples.demo.run import main

sys.exit(main())
