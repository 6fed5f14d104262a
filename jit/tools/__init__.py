"""What `python -m loader` offers: doctor, profile, sanitize and the rest of the command line.

May import every other room; none imports it.
"""
