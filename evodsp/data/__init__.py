"""Data: files on disk -> records -> what a worker hands over of a sample.

`formats/` reads one file into records. `sources/` finds the files of chains and joins what they hold. `templates/` makes
templates of the hits of a chain. `index/`, `building/`, `doctor/` and `fetch` are the commands `evodsp data`. `samples/` says
which chains are drawn, and makes samples of them.
"""
