"""Plans a run before GPUs are booked: memory, communication and time of any mesh, without a GPU and without processes."""
