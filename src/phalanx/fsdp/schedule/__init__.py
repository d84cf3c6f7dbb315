"""When units are gathered and reduced: hooks of modules and of autograd, prefetching."""
