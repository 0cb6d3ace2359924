"""Sparse training inside other libraries' training loops: Lightning, Hugging Face and Keras.

`dynsparse.integrations.lightning`, `.huggingface` and `.keras` are imported by those who use them;
each needs its library.
"""
