"""What another engine's tensors must be, and where they first part from it: `dsacp_npu.commands.validate` shows it.

::

    files -> reading.read_dump -> Dump -> report.examined -> Report: findings in the order of data flow, each with the
             (schema: names)                                         causes that would have given what was got

Everything is computed by `dsacp_ref` in numpy; torch is needed to read a torch file, and for nothing else.
"""
