"""A run is a folder. The only package that knows its format.

layout.py   names of the files, and how to recognise a run
write.py    the folder of a run that is training
read.py     a run as its folder recorded it, and the runs whose models it began with
atomic.py   whole files and folders, JSON lines, and one process per folder
evaluations.py  sampled responses and conversations
"""
