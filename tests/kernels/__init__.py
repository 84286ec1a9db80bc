"""Our CUDA kernels and the backend around them: the emulator, the compiler, the launcher and the tables."""
