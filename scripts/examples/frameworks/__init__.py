"""Dynamic Sequence Parallelism with training frameworks: one runnable program each. docs/frameworks.md shows and explains them.

    python -m scripts.examples.frameworks.one_process
    torchrun --nproc-per-node 4 -m scripts.examples.frameworks.data_parallel --framework ddp --sequence 2

All of them train the transformer of `model.py` and print the losses of `one_process.py`.
"""
