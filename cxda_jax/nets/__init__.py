"""Networks: trunks, heads, and the attention between them."""
