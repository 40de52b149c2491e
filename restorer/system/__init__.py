"""Files, memory and programs, as everything else here uses them."""
