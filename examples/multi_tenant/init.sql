-- Row level security does not bind a superuser, which the image's own role is: the application has a role of its own.
CREATE ROLE documents LOGIN PASSWORD 'documents';
CREATE DATABASE documents OWNER documents;
