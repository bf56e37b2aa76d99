"""Data: files on disk -> records -> features and labels -> samples.

`parsers/`, `mmcif`: the text of one file into records. `chain_folder`, `structures`, `store`: which files there are.
`msa`, `features`, `crop`, `templates/`: features, with numpy only. `dataset`: samples as torch tensors.
"""
