"""What one prefill costs under every way to share it among ranks: work, bytes, memory and time, from lengths alone.

::

    models   what a layer of each kind does a row, a key and a score, and what it keeps: numbers of a config
    chips    what a device does a second, each figure with its source
    shares   rows, keys and scores of every rank under a split, in closed form
    schemes  the ways to share a layer, and which of them cannot work
    flows    what every rank receives in a layer, call by call
    costs    the time of a scheme, what bounds it, what it keeps in memory
    choice   the best scheme, and the lengths from which one way beats another
    replay   a trace batch by batch

numpy only. Counts of work and bytes are exact: tests hold them to what the layers of `dsacp_npu.layer` do when they
run. Seconds are a model's: counts over rates, nothing overlapped (`docs/planning.md`).
"""
