"""The closed loop: observe → estimate → decide → act. What decides is pure; what acts is thin."""
