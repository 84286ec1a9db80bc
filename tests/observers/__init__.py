"""Compilers, modes, caches and states around a call: they change no answer, and a call changes none of them."""
