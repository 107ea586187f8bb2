"""The spiking student, its neuron and attention, and the frozen teacher. torch."""
