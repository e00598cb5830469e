"""How good the credit of a run is, and which rule would be better: `marlhf credit`."""
