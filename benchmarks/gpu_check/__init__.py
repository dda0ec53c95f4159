"""The acceptance run of one GPU: are the numbers right there, and how fast is it?"""
