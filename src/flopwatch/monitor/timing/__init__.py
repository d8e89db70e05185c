"""When steps, optimizers, phases and waits for batches begin and end, by the host's clock or by events of a device."""
