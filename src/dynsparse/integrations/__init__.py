"""Sparse training inside other libraries' training loops: Lightning and Hugging Face.

`dynsparse.integrations.lightning` and `dynsparse.integrations.huggingface` are imported by those
who use them; each needs its library.
"""
