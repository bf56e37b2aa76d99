"""Reading what others have written: texts, YAML, NumPy's files, pickles, and answers of servers.

Whatever such bytes hold, a reader here runs none of them, takes bounded time and memory, and fails with one line.
"""
