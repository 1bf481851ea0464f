"""The conv2d operator: forward, gradient of the input and gradient of the weight; one- and two-dimensional."""
