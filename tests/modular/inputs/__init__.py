"""What modular kernels take, and what their classes answer."""
