"""The version and the addresses of evodsp, in a module that every other one may import.

`python -m scripts.release` writes them into the other files that have them.
"""

__version__ = "0.2.0"
REPOSITORY = ""
"""Where the sources are: https://github.com/NAME/evodsp. Empty until there is such a place, and then written nowhere."""
DOCUMENTATION = ""
"""Where the pages are that `make docs` builds; likewise."""
