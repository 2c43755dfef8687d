"""This machine, a preset or a file: found, measured, remembered, corrected and looked after."""
