"""torch.compile on DTensors: Dynamo records global operations, our interception makes the local program of them."""
