"""The Triton kernels. Imported where they are launched, so that mctf works without Triton."""
